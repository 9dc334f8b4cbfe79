#!/usr/bin/env bash
# DeepSpeed 0.19.8: with AutoTP and no mpu, the rule train_batch_size = micro batch x accumulation x ranks counts the shards
# of tensor parallelism as if they had samples of their own. Eight ranks, autotp_size 4: two replicas, 2 x 4 x 2 = 16 samples
# a step; the configuration says 64, and refuses a file that says 16. torch's fake process group stands for the eight ranks.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip() { "$work/venv/bin/pip" install -qq --disable-pip-version-check "$@"; }
pip torch==2.13.0 numpy==2.3.4 setuptools==80.9.0 wheel==0.45.1 packaging==25.0 psutil==7.1.3 pydantic==2.12.4 py-cpuinfo==9.0.0 tqdm==4.67.1 hjson==3.1.0 einops==0.8.2 msgpack==1.1.2 ninja==1.13.0
DS_BUILD_OPS=0 pip --no-deps --no-build-isolation deepspeed==0.19.8
cat >"$work/batch.py" <<'PY'
from importlib.metadata import version
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig

deepspeed.comm.init_distributed("gloo", verbose=False, auto_mpi_discovery=False)
print("deepspeed", version("deepspeed"), "torch", version("torch").partition("+")[0])

def read(**said):
    given = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "tensor_parallel": {"autotp_size": 4}}
    try:
        return DeepSpeedConfig({**given, **said}).train_batch_size
    except AssertionError as error:
        return "refused: " + " ".join(str(error).split()[-9:])

print("nothing said ->", read())
print("16 said ->", read(train_batch_size=16))
PY
env -u PYTHONPATH DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 timeout 300 "$work/venv/bin/python" -W ignore "$work/batch.py" 2>/dev/null | grep -E "^(deepspeed|nothing|16)" | tee "$work/out"
grep -q "deepspeed 0.19.8" "$work/out"
grep -q "^nothing said -> 64" "$work/out"
grep -q "^16 said -> refused" "$work/out"
