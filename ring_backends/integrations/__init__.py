"""Where this package meets others' models; each module imports its framework, so import the one you use."""
