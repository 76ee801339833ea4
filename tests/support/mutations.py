"""Valid data changed a little, as a fuzzer does: one place in a tree of JSON, or a few bytes of a file."""

import copy

from hypothesis import strategies as st

DEEP = "nested"
for _ in range(200):
    DEEP = [DEEP]

ODD = [
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**32, 2**63, 2**64, 10**400, 0.5, -0.5, 1e308, 1e-320),
    *(
        float("nan"),
        float("inf"),
        "",
        "0",
        "1",
        "..",
        "../x",
        "a/b",
        "/etc/passwd",
        "\0",
        "\n",
        "\x1b[2J",
        "\ud800",
    ),
    *("x" * 400, [], {}, [[]], [0], [1, 2], {"": {}}, {"a": 1}, DEEP),
]
"""What is where something else should be."""


def places(data, found=None):
    """Every (container, key) of a tree of dicts and lists."""
    found = [] if found is None else found
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        found.append((data, key))
        if isinstance(value, (dict, list)):
            places(value, found)
    return found


@st.composite
def changed_trees(draw, tree):
    """The tree with one value replaced, left out, renamed, repeated or added."""
    tree = copy.deepcopy(tree)
    container, key = draw(st.sampled_from(places(tree)))
    how = draw(st.sampled_from(["replace", "replace", "remove", "add", "rename"]))
    odd = copy.deepcopy(draw(st.sampled_from(ODD)))
    if how == "replace":
        container[key] = odd
    elif how == "remove":
        del container[key]
    elif isinstance(container, list):
        container.insert(key, odd)
    elif how == "add":
        container[draw(st.sampled_from(["", "step", "x", "..", "\x1b"]))] = odd
    else:
        container[draw(st.sampled_from(["", "..", "x/y", "other"]))] = container.pop(key)
    return tree


@st.composite
def changed_bytes(draw, content):
    """The content with some bytes flipped, cut off, left out, put in or said twice."""
    at = draw(st.integers(0, len(content) - 1))
    end = min(len(content), at + draw(st.integers(1, 20)))
    how = draw(st.sampled_from(["flip", "cut", "leave out", "put in", "twice"]))
    if how == "flip":
        return content[:at] + bytes([content[at] ^ draw(st.integers(1, 255))]) + content[at + 1 :]
    if how == "cut":
        return content[:at]
    if how == "leave out":
        return content[:at] + content[end:]
    if how == "put in":
        return content[:at] + draw(st.binary(min_size=1, max_size=8)) + content[at:]
    return content[:end] + content[at:end] + content[end:]
