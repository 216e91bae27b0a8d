# For tools that look for this file; pyproject.toml has all that there is to say.
from setuptools import setup

setup()
