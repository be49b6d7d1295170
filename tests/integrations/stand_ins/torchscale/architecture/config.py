from torchscale_modules import *  # noqa: F403
