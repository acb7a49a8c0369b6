#!/usr/bin/env bash
# Everything that needs a GPU, in one command and under 10 minutes: the tests marked `accelerator`, then a benchmark of
# a real shape. Writes the figures as JSON and prints a short table last.
#
#     scripts/gpu_check.sh FIGURES.json [FOLDER OF WHEELS]
#
# Nothing is fetched. Packages that the machine lacks are installed from the folder of wheels (or from $WHEELS)
# into a temporary folder. $PYTHON is the interpreter (default python3), $BENCH_ARGUMENTS goes to
# `python -m benchmarks gpu`. The exit code is 0 only if there is a GPU and everything passed on it.
set -uo pipefail

figures=$(realpath -m "${1:?usage: scripts/gpu_check.sh FIGURES.json [FOLDER OF WHEELS]}")
wheels=${2:-${WHEELS:-}}
[ -z "$wheels" ] || wheels=$(realpath "$wheels")
python=${PYTHON:-python3}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONDONTWRITEBYTECODE=1

if [ -n "$wheels" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --target "$work/packages" "$wheels"/*.whl || exit 1
    export PYTHONPATH="$work/packages${PYTHONPATH:+:$PYTHONPATH}"
fi

code=0
start=$SECONDS
"$python" -c 'import torch' || exit 1 # its message says what is missing
if "$python" -c 'import sys; from torchround.accelerators import present_kind; sys.exit(present_kind() is None)'; then
    timeout 240 "$python" -m pytest -q -m 'accelerator and not nightly' -p no:cacheprovider \
        --junitxml "$work/tests.xml" tests/accelerator
    tests=$?
    if [ $tests -ne 0 ]; then
        echo "the accelerator's tests ended with code $tests (124: their time was up)" >&2
        code=1
    fi
    echo "tests took $((SECONDS - start)) s"
else # the simulated accelerator would pass them, which says nothing about this machine
    echo "no GPU: none of the accelerator's tests ran, the figures below are not a GPU's" >&2
    code=1
fi

[ -s "$work/tests.xml" ] && set -- --tests-xml "$work/tests.xml" || set --
# shellcheck disable=SC2086  (several arguments in one variable)
timeout 340 "$python" -m benchmarks gpu --check --budget-s 250 --json "$figures" "$@" ${BENCH_ARGUMENTS:-} || code=1
exit $code
