"""Support for models and trainers of other libraries, and for PyTorch's ``parallelize_module``; one module for each.

Attention and training themselves live elsewhere. A module imports its library, and any package below this one.
"""
