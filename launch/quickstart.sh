#!/usr/bin/env bash
# Trains a small mixture of experts through Megatron on this machine; no GPU is needed.
#
#   bash launch/quickstart.sh [--text PATH...] [--run-dir DIR] [--iterations N] [--restart]
#                             [--master-port P] [any flag of Megatron's or the extension's]
#
# The first run makes .venv at the repository root and installs everything there.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment
exec "$VENV/bin/python" -m megatron_ext.quickstart "$@"
