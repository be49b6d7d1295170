from gigapath_reference import *  # noqa: F403
