"""Refuses an environment whose torch is too old. The package itself is described in setup.cfg.

pip would replace an old torch, and with it the build that was chosen for the machine, by its newest release. pip builds
in an isolated process, which cannot import the environment's torch. So this file looks for it in the environment's
folders.
"""

from __future__ import annotations

import configparser
import re
import site
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

from setuptools import setup


def release(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 8, 0) of "2.8.0+cu126"."""
    return tuple(map(int, re.findall(r"\d+", text.partition("+")[0])[:3]))


def oldest_torch() -> str:
    """The lower bound of torch in setup.cfg."""
    config = configparser.ConfigParser()
    config.read(Path(__file__).with_name("setup.cfg"), encoding="utf-8")
    found = re.search(r"^torch >=([\d.]+)$", config["options"]["install_requires"], re.MULTILINE)
    assert found is not None
    return found[1]


def refuse_an_older_torch() -> None:
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if sys.prefix == sys.base_prefix:  # a virtual environment does not see the user's packages
        folders.append(site.getusersitepackages())
    oldest = oldest_torch()
    for installed in distributions(name="torch", path=folders):
        version = installed.metadata["Version"]  # None after an interrupted uninstall
        if version and release(version) < release(oldest):
            raise SystemExit(
                f"torch {version} is installed, but ring_backends needs torch {oldest} or newer. To install "
                f'it first, with the build that you want: pip install --upgrade "torch>={oldest}"'
            )


refuse_an_older_torch()
setup()
