# Sourced by quickstart.sh and tests/run.sh: makes .venv at the repository root and installs there.
#
#   prepare_environment [EXTRA]    EXTRA: an extra of pyproject.toml, such as "test"
#
# PYTHON chooses the interpreter; without it, the first Python >= 3.12 that really runs.

set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv

die() { echo "error: $*" >&2; exit 1; }

# A name on PATH proves nothing: it may be a shim without a version behind it. megatron-core has
# wheels for 3.12 and 3.13.
python_works() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' \
    >/dev/null 2>&1
}

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    python_works "$PYTHON" || die "PYTHON=$PYTHON is no Python 3.12 or 3.13 with venv and pip"
    echo "$PYTHON"
    return
  fi
  for candidate in python3.12 python3.13 python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23]*/bin/python3; do
    if python_works "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  if command -v uv >/dev/null 2>&1; then
    uv python install --quiet 3.12 >/dev/null 2>&1 || true
    candidate=$(uv python find 3.12 2>/dev/null || true)
    if [ -n "$candidate" ] && python_works "$candidate"; then
      echo "$candidate"
      return
    fi
  fi
  die "no Python 3.12 or 3.13 with venv was found (PATH, pyenv, uv). Install one (apt install" \
    "python3.12-venv, pyenv install 3.12, uv python install 3.12, or conda create python=3.12)" \
    "and run this again, or name it: PYTHON=/path/to/python3.12 bash $0"
}

# Changes with everything that the installation depends on.
fingerprint() {
  (cd "$ROOT" && cat pyproject.toml setup.py && find csrc -type f -print0 | sort -z | xargs -0 cat) |
    cksum
  echo "${1:-} cuda=${MEGATRON_EXT_CUDA:-} archs=${TORCH_CUDA_ARCH_LIST:-} root=$ROOT"
}

prepare_environment() {
  # Two scripts at a time would install into one .venv.
  if command -v flock >/dev/null; then
    exec 9>"$ROOT/.venv.lock"
    flock 9
  fi
  _prepare_environment "$@"
  exec 9>&-
}

_prepare_environment() {
  local extra=${1:-} stamp=$VENV/.installed${1:+-$1} log=$VENV/install.log began=$SECONDS python
  if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint "$extra")" ]; then
    return
  fi
  if ! { [ -x "$VENV/bin/python" ] && python_works "$VENV/bin/python"; }; then
    python=$(find_python)
    echo "making .venv with $("$python" --version)"
    [ ! -e "$VENV" ] || [ -e "$log" ] ||
      die "$VENV is there, was not made by this script and has no Python 3.12 or 3.13: move it away"
    rm -rf "$VENV"
    "$python" -m venv "$VENV" || die "$python cannot make a virtual environment in $ROOT"
  fi
  echo "installing torch, Megatron and this extension into .venv; the first time takes minutes" \
    "and 6 GB (log: $log)"
  rm -f "$stamp"
  # Headers only, for the H100 kernels; what else the package depends on is not needed.
  if [ "${MEGATRON_EXT_CUDA:-}" != 0 ] && command -v nvcc >/dev/null; then
    "$VENV/bin/python" -m pip install --quiet --no-deps nvidia-cutlass==4.2.0.0 >"$log" 2>&1 ||
      echo "nvidia-cutlass cannot be installed: no special kernels for H100 (log: $log)"
  fi
  (cd "$ROOT" && "$VENV/bin/python" -m pip install --editable ".${extra:+[$extra]}" --verbose) \
    >>"$log" 2>&1 &
  # bash lets a background job ignore Ctrl-C: without this, pip would go on alone.
  trap 'kill %1 2>/dev/null || true' EXIT
  wait_with_progress $! "$log" || {
    tail -n 15 "$log" >&2
    die "the installation failed; the whole log: $log"
  }
  trap - EXIT
  grep -h -A3 'megatron_ext is built for torch' "$log" | sed 's/^ *//' || true
  fingerprint "$extra" >"$stamp"
  echo "installed in $((SECONDS - began)) s"
}

# Shows what pip is at, every few seconds, for as long as process $1 runs; returns its status.
wait_with_progress() {
  local began=$SECONDS last="" now
  while kill -0 "$1" 2>/dev/null; do
    sleep 1
    now=$(grep -aoE '^ *(Collecting|Downloading|Installing collected|Building|\[[0-9]+/[0-9]+\])[^;(]{0,60}' \
      "$2" 2>/dev/null | tail -n 1 | sed 's/^ *//' || true)
    if [ -n "$now" ] && [ "$now" != "$last" ] && [ $(((SECONDS - began) % 5)) -eq 0 ]; then
      printf '  %4d s  %s\n' $((SECONDS - began)) "$now"
      last=$now
    fi
  done
  wait "$1"
}
