"""Support for models and trainers of other libraries. Each module imports its library."""
