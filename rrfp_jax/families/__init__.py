"""Published families of models: how their files name and arrange what the layers of `models/` hold."""
