#!/usr/bin/env bash
# Everything that needs a GPU, in one command and under 8 minutes: the tests marked `gpu`, then a benchmark of a
# real shape. Writes the figures as JSON and prints a short table last.
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
timeout 220 "$python" -m pytest -q -m gpu -p no:cacheprovider --junitxml "$work/tests.xml" \
    tests/engine/test_cuda*.py
tests=$?
if [ $tests -eq 5 ]; then # pytest's code when it collected nothing
    echo "no GPU: none of the gpu tests ran, the figures below are not a GPU's" >&2
    code=1
elif [ $tests -ne 0 ]; then
    echo "the gpu tests ended with code $tests (124: their time was up)" >&2
    code=1
fi
echo "tests took $((SECONDS - start)) s"

[ -s "$work/tests.xml" ] && set -- --tests-xml "$work/tests.xml" || set --
# shellcheck disable=SC2086  (several arguments in one variable)
timeout 250 "$python" -m benchmarks gpu --check --budget-s 170 --json "$figures" "$@" ${BENCH_ARGUMENTS:-} || code=1
exit $code
