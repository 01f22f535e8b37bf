"""A PyTorch model as a chain of layers that can be cut into stages (the only torch import of this package)."""
