"""Map the rooms at the top of the repository into one namespace: ``policies/`` is
installed as ``moesim.policies``.
"""

from setuptools import find_packages, setup

ROOMS = ("engine", "hwprofiles", "policies", "runtime", "sim", "traces")

packages = find_packages(include=["moesim", "moesim.*"])
for room in ROOMS:
    packages.append(f"moesim.{room}")
    packages += [f"moesim.{room}.{inner}" for inner in find_packages(room)]

setup(packages=packages, package_dir={f"moesim.{room}": room for room in ROOMS})
