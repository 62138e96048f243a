#!/bin/bash
# Installs the Debian packages named in a file, one a line, that are not there yet. Needs root for that;
# without it, says what to install and lets the build find out what it can do without.
set -euo pipefail

missing=()
while read -r package; do
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing+=("$package")
done < <(grep -v -e '^#' -e '^$' "$1")

if [ ${#missing[@]} -eq 0 ]; then
  exit 0
elif [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get update -q
  DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${missing[@]}"
else
  echo "Not root, or not Debian: if the build misses something, install: ${missing[*]}" >&2
fi
