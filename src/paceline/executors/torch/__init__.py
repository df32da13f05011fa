"""Any graph of ``ops`` in PyTorch, on a CPU or a CUDA GPU: ``executor`` serves, ``forward`` keeps gradients.

Nothing else in the package imports torch; ``engine.loading`` imports this package when it is asked for.
"""
