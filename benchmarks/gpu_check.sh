#!/usr/bin/env bash
# Everything that only a GPU can show, in one script of at most nine minutes: for a machine with one NVIDIA GPU and no
# network. Python 3.12 with torch, torchvision, click, msgpack, rich, numpy and pytest must be there; pyzmq and pydantic
# (and cloup, with a click of 8.5 or later) may be carried as wheels.
#
#   benchmarks/gpu_check.sh [--out FOLDER] [--wheels FOLDER] [--dry-run]
#
#   --out FOLDER     where results go                       [default: gpu-check]
#   --wheels FOLDER  install what is in it beside the rest, without a network
#   --dry-run        on the CPU, with tiny settings: that the script itself works
#
# Results: FOLDER/profiles/*.json (profiles of this GPU), FOLDER/*.txt (what each step said), FOLDER/trace.json (of four
# workers that share the GPU) and FOLDER/summary.txt.
set -uo pipefail
cd "$(dirname "$0")/.."

out=gpu-check wheels="" dry=""
while [ $# -gt 0 ]; do
    case "$1" in
        --out) out=$2; shift 2 ;;
        --wheels) wheels=$2; shift 2 ;;
        --dry-run) dry=1; shift ;;
        *) echo "$1: expected --out FOLDER, --wheels FOLDER or --dry-run" >&2; exit 2 ;;
    esac
done
python=${PYTHON:-python3}
mkdir -p "$out/profiles"
out=$(cd "$out" && pwd)
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "$wheels" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$out/site" "$wheels"/*.whl || exit 1
    export PYTHONPATH="$PYTHONPATH:$out/site"
fi

started=$(date +%s)
limit=540
failed=0
: >"$out/summary.txt"

say() { echo "$*" | tee -a "$out/summary.txt"; }

# step NAME MOST_SECONDS LINES COMMAND...: runs within the time left, keeps all output, shows the last lines.
step() {
    local name=$1 most=$2 lines=$3 left result begun
    shift 3
    left=$((limit - $(date +%s) + started))
    if [ "$left" -lt 5 ]; then
        say "== $name: left out, the time is over"
        failed=1
        return
    fi
    begun=$(date +%s)
    timeout $((most < left ? most : left)) "$@" >"$out/$name.txt" 2>&1
    result=$?
    [ $result -eq 0 ] || failed=1
    say "== $name: $([ $result -eq 0 ] && echo done || echo "FAILED ($result)") in $(($(date +%s) - begun)) s"
    tail -n "$lines" "$out/$name.txt" | tee -a "$out/summary.txt"
}

program() { local name=$1; shift; "$python" -c "from $name.cli import main; main()" "$@"; }
export -f program
export python

profile() { # MODEL MINIBATCH_SIZE
    local size=$2 more=()
    [ -n "$dry" ] && size=2 more=(--device cpu --threads 1)
    step "profile-$1" 120 2 bash -c 'program pd_profile "$@"' - "$1" --minibatch-size "$size" \
        --minibatches "$minibatches" "${more[@]}" --output "$out/profiles/$1.json"
}

minibatches=1000 device=cuda few=100 size=64 pixels=224 model=vgg16
[ -n "$dry" ] && minibatches=1 device=cpu few=4 size=2 pixels=64 model=alexnet

step machine 60 4 bash -c 'nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null
    "$python" -c "import platform, torch; print(torch.__version__, torch.version.cuda, platform.python_version())"'
step tests 120 3 "$python" -m pytest -q -p no:cacheprovider -m gpu -rs tests
profile vgg16 64
profile alexnet 256
profile resnet50 128
profile inception_v3 128
[ -n "$dry" ] || profile s2vt 80
step plan 30 8 bash -c 'program pd_plan "$@"' - --profile "$out/profiles/$model.json" --machines 8 --bandwidth 10gbps \
    --output "$out/plan-8.json"
step plan-4 30 1 bash -c 'program pd_plan "$@"' - --profile "$out/profiles/$model.json" --machines 4 --config 2-1-1 \
    --bandwidth 10gbps --output "$out/plan-4.json"
rm -rf "$out/run"
data=(--data synthetic:$((few * size)) --minibatches "$few")
step four-workers 120 12 bash -c 'program pd_train "$@"' - --plan "$out/plan-4.json" "${data[@]}" --device "$device" \
    --trace-minibatches 0:20 --run-dir "$out/run"
cp "$out/run/trace.json" "$out/run/report.json" "$out/" 2>/dev/null
step one-stage 150 4 "$python" benchmarks/one_stage.py "$model" --minibatch-size "$size" --pixels "$pixels" \
    --minibatches "$few" --pairs 2 --device "$device"
say "== all: $([ $failed -eq 0 ] && echo done || echo 'something FAILED') in $(($(date +%s) - started)) s; files in $out"
exit $failed
