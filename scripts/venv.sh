#!/bin/sh
# Make the virtual environment that the Makefile's targets run in, or bring it up to date.
#
#     sh scripts/venv.sh FOLDER core|full
#
# core has what a user gets; full has every extra and the tools of the tests. The system's Python is
# left alone. PYTHON=… names an interpreter; else the first that can do it is taken, the version that
# constraints.txt was made with before the others. Nothing is done if nothing has changed.
set -eu

folder=$1
level=$2
stamp=$folder/.installed

fail() {
    printf 'Error: %s\nHint: %s\n' "$1" "$2" >&2
    exit 1
}

# As a whole: a shim may be on the path and have no Python behind it.
answers() { "$1" -c "$2" >/dev/null 2>&1; }

names='python3.11 python3.12 python3.13 python3'
new_enough='import sys; sys.exit(sys.version_info < (3, 11))'
makes_venvs='import venv, ensurepip'

find_python() {
    old=
    without_venv=
    if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- $names; fi
    for one in "$@"; do
        if ! answers "$one" 'pass'; then
            continue
        elif ! answers "$one" "$new_enough"; then
            old=$("$one" -c 'import platform; print(platform.python_version())')
        elif ! answers "$one" "$makes_venvs"; then
            without_venv=${without_venv:-$one}
        else
            python=$one
            return
        fi
    done
    if [ -n "$without_venv" ]; then
        version=$("$without_venv" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
        fail "$without_venv cannot make a virtual environment: its venv or ensurepip is missing" \
            "sudo apt-get install $version-venv"
    elif [ -n "$old" ]; then
        fail "kvtool needs Python 3.11 or newer, and this is $old" \
            "sudo apt-get install python3.11 python3.11-venv, or name one: make demo PYTHON=…"
    fi
    fail "no Python was found (looked for: $*)" \
        "sudo apt-get install python3 python3-venv, or name one: make demo PYTHON=…"
}

case $level in
    core) extras= ;;
    full) extras='[bench,plot,sweep,dev]' ;;
    *) fail "unknown level: $level" "sh scripts/venv.sh FOLDER core|full" ;;
esac

# bin/pip is the last file that venv writes; an interpreter that is gone is a link to nothing.
if ! [ -x "$folder/bin/pip" ] || ! answers "$folder/bin/python" "$new_enough"; then
    if [ -e "$folder" ] && ! [ -f "$folder/pyvenv.cfg" ]; then
        fail "$folder is there and is no virtual environment" "name another folder: make demo VENV=…"
    fi
    find_python
    echo "$folder: a new environment of $("$python" --version)" >&2
    "$python" -m venv --clear "$folder"
fi

wanted=$(pwd)/$(cat pyproject.toml constraints.txt | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" = "full $wanted" ] ||
    [ "$(cat "$stamp" 2>/dev/null)" = "$level $wanted" ]; then
    exit 0
fi
echo "$folder: installing kvtool$extras" >&2
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint constraints.txt --editable ".$extras"
echo "$level $wanted" >"$stamp"
