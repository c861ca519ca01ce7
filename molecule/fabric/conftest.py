"""A stack for jobs: Debian's own OpenMPI takes the place of the stack's."""

from concurrent.futures import ThreadPoolExecutor

import pytest

STACK = "/opt/farandole/current"
# A minimal stack of links to Debian's programs, with OpenMPI's settings where Debian's build reads them.
INSTALL = f"""
set -e
apt-get -qq install --no-install-recommends openmpi-bin
mkdir -p {STACK}/mpi/bin {STACK}/venv/bin
ln -sf /usr/bin/mpirun.openmpi {STACK}/mpi/bin/mpirun
ln -sf /usr/bin/orted {STACK}/mpi/bin/orted
ln -sf /usr/bin/env {STACK}/venv/bin/horovodrun
ln -sf /usr/bin/python3 {STACK}/venv/bin/python
ln -sf /etc/farandole/openmpi/openmpi-mca-params.conf /etc/openmpi/openmpi-mca-params.conf
"""


@pytest.fixture(scope="session")
def stack(nodes):
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda host: host.check_output("sh -c %s", INSTALL), nodes.values()))
