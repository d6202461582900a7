#!/usr/bin/env bash
# Checks style and types and runs the tests, the fast ones first; arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"
prepare_environment test
cd "$ROOT"
bin=$VENV/bin

"$bin/ruff" check .
"$bin/black" --quiet --check . || { "$bin/black" --check .; exit 1; }
"$bin/mypy"
find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | sort |
  xargs "$bin/clang-format" --dry-run -Werror
for script in launch/*.sh tests/*.sh; do bash -n "$script"; done

if [ $# -gt 0 ]; then exec "$bin/python" -m pytest "$@"; fi
exec "$bin/python" -m pytest
