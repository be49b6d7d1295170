"""Support for models and trainers of other libraries, one module per library.

Attention and training themselves live elsewhere. A module imports its library, and any package below this one.
"""
