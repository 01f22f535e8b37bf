#!/usr/bin/env bash
# Profiles, plans and trains examples/digits_cnn.py on the real handwritten digits, with four worker processes.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf demo-run
mkdir demo-run

pd-profile examples/digits_cnn.py:digits_cnn --data digits --minibatch-size 32 --minibatches 60 \
    --threads 1 --output demo-run/profile.json
pd-plan --profile demo-run/profile.json --machines 4 --bandwidth 1gbps --output demo-run/plan.json
pd-train --plan demo-run/plan.json --epochs 10 --lr 0.02 --target-accuracy 0.97 --run-dir demo-run/run
