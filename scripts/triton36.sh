#!/bin/sh
# Run the kernels' tests with triton 3.6.0, the oldest release that the kernels are held to.
#
#     sh scripts/triton36.sh FOLDER [PYTEST ARGUMENTS]
#
# FOLDER becomes a virtual environment with triton 3.6.0, torch, numpy and pytest, and nothing of
# kvtool installed: the kernels stand alone. Registers and spills differ between triton's releases,
# so the gates on compiled code are read with this one too. PYTHON=… names an interpreter, TORCH=… a
# release of torch, whose own choice of triton is overruled here (the kernels use tensors only).
# numpy stays below 2.4, or 3.6.0's interpreter fails at each loop (triton-lang/triton#9171).
set -eu

folder=${1:?"sh scripts/triton36.sh FOLDER [PYTEST ARGUMENTS]"}
shift
wanted="torch ${TORCH:-2.13.0}"

if [ "$(cat "$folder/.installed" 2>/dev/null)" != "$wanted" ]; then
    if [ -e "$folder" ] && ! [ -f "$folder/pyvenv.cfg" ]; then
        printf 'Error: %s is there and is no virtual environment\nHint: name another folder\n' \
            "$folder" >&2
        exit 2
    fi
    python=
    for one in ${PYTHON:-python3.11 python3.12 python3}; do
        # A shim may be on the path and have no Python behind it.
        if "$one" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
        then python=$one && break; fi
    done
    if [ -z "$python" ]; then
        printf 'Error: no Python from 3.11 on that can make environments\nHint: PYTHON=… sh %s %s\n' \
            "$0" "$folder" >&2
        exit 1
    fi
    echo "$folder: a new environment with triton 3.6.0 and torch ${TORCH:-2.13.0}" >&2
    "$python" -m venv --clear "$folder"
    set_up="$folder/bin/python -m pip install --quiet --disable-pip-version-check"
    $set_up "torch==${TORCH:-2.13.0}" "numpy<2.4" pytest
    $set_up --no-deps "triton==3.6.0"
    echo "$wanted" >"$folder/.installed"
fi

# Without tests/conftest.py, which imports kvtool's command line and what that needs. The slow tests
# too: sh scripts/triton36.sh FOLDER -m ''
exec "$folder/bin/python" -m pytest --confcutdir tests/kernels -p no:cacheprovider \
    -m "not slow" tests/kernels "$@"
