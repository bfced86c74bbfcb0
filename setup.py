"""Package layout; the native build is attached here."""

import runpy

from setuptools import find_packages, setup

setup(
    version=runpy.run_path("lmi_core/version.py")["__version__"],
    packages=[*find_packages(include=["lmi_core*"]), "lmi_server"],
    package_dir={"lmi_server": "server"},
    package_data={"lmi_core": ["py.typed", "demo/*"], "lmi_server": ["py.typed"]},
)
