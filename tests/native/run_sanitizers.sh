#!/bin/sh
# Builds the C++ unit tests in a temporary folder and runs them: with address and undefined-behaviour checks (all
# memory from the heap, where they see every access), with the thread checker, or with none. Needs g++ (or $CXX) only.
#
# Usage: tests/native/run_sanitizers.sh [address,undefined | thread | none]...
# STEPS: random calls of each setup. OPTIMIZE: the compiler's level.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
native=$here/../../hybridrec/native
cxx=${CXX:-g++}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

run() {
  checks="-fsanitize=$1 -fno-sanitize-recover=all -fno-omit-frame-pointer -g -DHYBRIDREC_PLAIN_MEMORY=1"
  [ "$1" != none ] || checks=""
  flags="-std=c++20 ${OPTIMIZE:--O1} -ffp-contract=off -Wall -Wextra -Werror -I$native/include $checks"
  ls -S "$native"/src/*.cpp "$here"/*.cpp |
    xargs -P "$(nproc)" -I{} sh -c "$cxx $flags -c {} -o $work/\$(basename {} .cpp).o"
  # shellcheck disable=SC2086  # flags are words
  $cxx $checks "$work"/*.o -pthread -o "$work/native_tests"
  echo "sanitizer: $1"
  timeout 900 "$work/native_tests" ${STEPS:+"$STEPS"}  # a lock that is missing may also show as a hang
  rm "$work"/*
}

[ $# -gt 0 ] || set -- address,undefined thread
for sanitizer in "$@"; do run "$sanitizer"; done
