#!/usr/bin/env bash
# Installs Debian packages that tests need and that are not here yet. Without root, apt-get or a network it says so and
# goes on: the tests that need them are then left out, with the reason.
#
#     tests/install-packages.sh iproute2 openmpi-bin
set -uo pipefail

missing=()
for package in "$@"; do
    if ! dpkg-query --show --showformat '${db:Status-Status}' "$package" 2> /dev/null | grep -qx installed; then
        missing+=("$package")
    fi
done
if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
    echo "not installed, which takes root and apt-get: ${missing[*]}"
    exit 0
fi
install() {
    DEBIAN_FRONTEND=noninteractive timeout 240 apt-get install -qq -y --no-install-recommends "${missing[@]}" > /dev/null
}
if ! install && ! { timeout 120 apt-get update -qq && install; }; then
    echo "not installed, since apt-get failed: ${missing[*]}"
fi
exit 0
