"""Support for models and trainers of other libraries, and for PyTorch's ``parallelize_module``.

Each has a module or a folder. Attention and training themselves live elsewhere. A module imports its library, and any
package below this one.
"""
