"""Installs the wheel of dist/ in fresh environments, and lists what to upload and what is left to do.

``tox run -e release`` builds and checks dist/, and then runs this program. It runs the environments ``py3…-install`` of
tox.ini with the wheel. tox leaves out the Pythons that it does not find. Arguments select other environments:
``tox run -e release -- -e py312-install``.
"""

from __future__ import annotations

import configparser
import hashlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def left_to_do(version: str) -> list[str]:
    """What a release still needs, read from the tree."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    to_do = []
    if "project_urls" not in config["metadata"]:
        to_do.append("setup.cfg: fill in project_urls (Homepage, Source, Documentation, Changelog)")
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    if links:
        to_do.append(f"README.md: a package index does not resolve its {len(links)} relative links and pictures")
    if f"## [{version}] - unreleased" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        to_do.append(f"CHANGELOG.md: replace 'unreleased' by the date of release {version}")
    done = subprocess.run(
        ["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    if f"v{version}" not in done.stdout.split():
        to_do.append(f"tag this commit: git tag v{version}")
    return to_do


def main() -> None:
    (wheel,) = (ROOT / "dist").glob("*.whl")
    (sdist,) = (ROOT / "dist").glob("*.tar.gz")
    selected = sys.argv[1:] or ["-m", "install"]
    installing = [sys.executable, "-m", "tox", "run", "--recreate", "--installpkg", str(wheel), *selected]
    subprocess.run(installing, cwd=ROOT, check=True)
    print("\nUpload:")
    for path in (sdist, wheel):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"  {path.relative_to(ROOT)}  {path.stat().st_size:,} bytes  sha256 {digest}")
    to_do = left_to_do(wheel.name.split("-")[1])
    print("\nBefore the upload:" if to_do else "\nNothing is left to do before the upload.")
    for line in to_do:
        print(f"  {line}")


if __name__ == "__main__":
    main()
