"""What of a module is to run, for fixtures that do the work of many tests at once."""


def selected(request, name):
    """The values that a parameter has in the tests of this module that are to run, each once."""
    tests = [item for item in request.session.items if item.path == request.path]
    given = [item.callspec.params for item in tests if hasattr(item, "callspec")]
    return list(dict.fromkeys(params[name] for params in given if name in params))


def is_quick(request):
    """Whether this is `make test`, for which a few cases are enough."""
    return request.config.getoption("quick", default=False)
