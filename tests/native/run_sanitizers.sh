#!/bin/sh
# Builds the C++ unit tests in a temporary folder and runs them: with address and undefined-behaviour checks (all
# memory from the heap, where they see every access), then with the thread checker. Needs g++ (or $CXX) only.
#
# Usage: tests/native/run_sanitizers.sh [address,undefined | thread]...
set -eu

here=$(cd "$(dirname "$0")" && pwd)
native=$here/../../hybridrec/native
cxx=${CXX:-g++}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

run() {
  flags="-std=c++20 -O1 -g -fno-omit-frame-pointer -ffp-contract=off -Wall -Wextra -Werror"
  flags="$flags -fsanitize=$1 -fno-sanitize-recover=all -DHYBRIDREC_PLAIN_MEMORY=1 -I$native/include"
  ls "$native"/src/*.cpp "$here"/*.cpp |
    xargs -P "$(nproc)" -I{} sh -c "$cxx $flags -c {} -o $work/\$(basename {} .cpp).o"
  $cxx -fsanitize="$1" "$work"/*.o -pthread -o "$work/native_tests"
  echo "-fsanitize=$1"
  "$work/native_tests"
  rm "$work"/*
}

[ $# -gt 0 ] || set -- address,undefined thread
for sanitizer in "$@"; do run "$sanitizer"; done
