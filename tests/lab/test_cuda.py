"""The stack for GPUs, on a node without one: Horovod with NCCL is compiled, installed and loaded.

What says that there is a driver is a file; the toolkit is made of NVIDIA's wheels, and NCCL's debs of another.
"""

import json
import subprocess
import sys
from pathlib import Path

from clusters import ROOT, Cluster

sys.path.append(str(ROOT / "molecule/nccl"))
from make_debs import checksum, debs, wheel

NODES = 1
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025"
WHEEL = "nvidia_{}-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"
TOOLKIT = {
    WHEEL.format("cuda_nvcc-13.0.88"): "56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03",
    WHEEL.format("cuda_crt-13.0.88"): "2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4",
    WHEEL.format("cuda_runtime-13.0.96"): "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
    WHEEL.format("cuda_cccl-13.0.85"): "e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649",
    "nvidia_nvvm-13.0.88-py3-none-manylinux2010_x86_64.manylinux_2_12_x86_64.whl": (
        "c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0"
    ),
}
NCCL = (
    "nvidia_nccl_cu13-2.29.7-py3-none-manylinux_2_18_x86_64.whl", "13.2",
    "edd81538446786ec3b73972543e53bb43bcaf0bfc8ef76cb679fcc390ffe136d",
)  # fmt: skip
# Where NVIDIA's own packages put it.
UNPACK = """
cd /root/toolkit && for one in *.whl; do python3 -m zipfile -e $one .; done && mv nvidia/cu13 /usr/local/cuda &&
cd /usr/local/cuda && chmod +x bin/* nvvm/bin/* && ln -s lib lib64 && ln -s libcudart.so.13 lib/libcudart.so
"""
LINKED = "ldd /opt/farandole/current/venv/lib/python3*/site-packages/horovod/torch/mpi_lib_v2*.so"
LOADED = """
import horovod.torch as hvd, torch
hvd.init()
total = hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist()
print("CUDA", torch.version.cuda, hvd.cuda_built(), "NCCL", hvd.nccl_built(), total)
"""


def test_horovod_with_nccl_is_compiled_and_loaded_without_a_gpu(cluster: Cluster, tmp_path: Path) -> None:
    proc = "/proc/driver/nvidia"
    driver = f"mount -t tmpfs none {proc[:-7]} && mkdir {proc} && echo '{DRIVER}' >{proc}/version"
    assert cluster.shell("node-1", f"mkdir /root/toolkit && {driver}").returncode == 0
    wheels = [wheel(file, sha256) for file, sha256 in TOOLKIT.items()]
    subprocess.run(["scp", "-q", "-F", cluster.inventory / ".ssh/config", *wheels, "node-1:/root/toolkit"], check=True)
    assert cluster.shell("node-1", UNPACK).returncode == 0
    debs(*NCCL, tmp_path)
    files = [{"path": str(deb), "sha256": checksum(deb)} for deb in tmp_path.glob("*.deb")]
    settings = {"stack_frameworks": ["pytorch"], "nccl_source": "files", "nccl_files": files}
    cluster.play_ok("--extra-vars", json.dumps(settings))
    linked = cluster.shell("node-1", LINKED).stdout
    assert "libnccl.so.2 => /lib/x86_64-linux-gnu/libnccl.so.2" in linked
    assert "libcudart.so.13 => " in linked
    assert "not found" not in linked
    # The builder alone needs the toolkit.
    for prepare in ("true", "mv /usr/local/cuda /root"):
        assert cluster.shell("node-1", prepare).returncode == 0
        job = cluster.farandole("run", "--", "python", "-c", LOADED)
        assert "CUDA 13.0 True NCCL 22907 [1.0, 1.0]" in job.stdout
