#!/usr/bin/env bash
# For a machine with one GPU and no network: the gpu tests, then the step at the reference run's size. Under 8 minutes.
# Needs torch >= 2.11, transformers, lightning, torchmetrics, safetensors; neither `datasets` nor an installation.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=. PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
PYTHON=${PYTHON:-python3}
$PYTHON -c "import torch, transformers; print(torch.__version__, transformers.__version__, torch.cuda.get_device_name())"
status=0
timeout 200 "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider -o addopts= -o timeout=0 tests/test_gpu.py || status=$?
timeout 140 "$PYTHON" benchmarks/gpu_step.py || status=$?
timeout 140 "$PYTHON" benchmarks/gpu_step.py --compile || status=$?
exit $status
