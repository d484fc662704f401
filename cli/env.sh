# Make or reuse the Python environment of this checkout. Source it: . cli/env.sh [dev]
# Sets $TPF_PYTHON. Re-running takes milliseconds while pyproject.toml and constraints.txt are
# unchanged. TPF_VENV names another folder for the environment; TPF_BASE_PYTHON another Python.

tpf_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tpf_venv=${TPF_VENV:-$tpf_root/.venv}
tpf_extras=${1:-run}
TPF_PYTHON=$tpf_venv/bin/python

tpf_find_python() {
  local candidate
  for candidate in ${TPF_BASE_PYTHON:-python3 python3.12 python3.13 python3.11 python3.14}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return 0
    fi
  done
  echo "tpf: no Python 3.11 or newer found; install one or set TPF_BASE_PYTHON" >&2
  return 3
}

tpf_install() {
  local python extras torch_pin
  python=$(tpf_find_python) || return 3
  echo "tpf: preparing the environment in $tpf_venv (once; about a minute)" >&2
  [ -x "$TPF_PYTHON" ] || "$python" -m venv "$tpf_venv" || return 1
  extras=chem
  [ "$tpf_extras" = dev ] && extras=chem,dev
  torch_pin=$(grep -E '^torch==' "$tpf_root/constraints.txt")
  if ! "$TPF_PYTHON" -c 'import torch' 2>/dev/null; then
    # Without an NVIDIA GPU prefer the CPU build; it is small, where the index offers it.
    if ! command -v nvidia-smi >/dev/null 2>&1 &&
      "$TPF_PYTHON" -m pip install -q "$torch_pin+cpu" >/dev/null 2>&1; then :; else
      "$TPF_PYTHON" -m pip install -q "$torch_pin" >&2 || return 1
    fi
  fi
  "$TPF_PYTHON" -m pip install -q -c "$tpf_root/constraints.txt" "setuptools>=77" wheel >&2 || return 1
  "$TPF_PYTHON" -m pip install -q -c "$tpf_root/constraints.txt" --no-build-isolation \
    -e "$tpf_root[$extras]" >&2 || return 1
}

tpf_stamp=$tpf_venv/.tpf-$tpf_extras
tpf_want=$(cat "$tpf_root/pyproject.toml" "$tpf_root/constraints.txt" | cksum)
tpf_have=$(cat "$tpf_stamp" "$tpf_venv/.tpf-dev" 2>/dev/null)
case "$tpf_have" in
  *"$tpf_want"*) [ -x "$TPF_PYTHON" ] ;;
  *) tpf_install && echo "$tpf_want" >"$tpf_stamp" ;;
esac
