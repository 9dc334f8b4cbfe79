#!/usr/bin/env bash
# torch 2.14.1 (and 2.13.0) as PyPI has it, built for GPUs, on a machine without one: whether a forked process can run a
# backward is decided by the FIRST backward of its parent. If that was on fake tensors (FakeTensorMode: planning, memory
# estimates), autograd starts device threads, and every later fork fails with "Unable to handle autograd's threading in
# combination with fork-based multiprocessing"; one tiny real backward before it, and all forks work, fake ones included.
# The CPU build (2.13.0+cpu) never fails. Takes 6 GB and two minutes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --disable-pip-version-check torch==2.14.1
cat >"$work/fork.py" <<'PY'
import os, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch._subclasses import FakeTensorMode

def backward():
    (torch.ones(2, requires_grad=True) * 2).sum().backward()

print("torch", torch.__version__, "built for CUDA", torch.version.cuda, "GPUs", torch.cuda.device_count(), flush=True)
if "real first" in sys.argv:
    backward()
with FakeTensorMode():
    backward()
if os.fork() == 0:
    try:
        backward()
        print(sys.argv[1], "-> the fork's backward: works", flush=True)
    except RuntimeError as error:
        print(sys.argv[1], "-> the fork's backward:", str(error)[:54], flush=True)
    os._exit(0)
os.wait()
PY
env -u PYTHONPATH "$work/venv/bin/python" "$work/fork.py" "fake first" | tee "$work/out"
env -u PYTHONPATH "$work/venv/bin/python" "$work/fork.py" "real first" | tee -a "$work/out"
grep -q "GPUs 0" "$work/out"
grep -q "fake first -> the fork's backward: Unable to handle autograd's threading in combination" "$work/out"
grep -q "real first -> the fork's backward: works" "$work/out"
