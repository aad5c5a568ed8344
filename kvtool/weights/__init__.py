"""The parameters of a model, counted from its config, and the bytes that they take."""
