#!/bin/sh
# leaks.sh COMMAND...: runs a Python program with the address sanitizer before it, whose interpreter knows nothing of
# that. What the interpreter and its other modules hold at the end is their affair; memory that our code took and nobody
# released fails.
set -u
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
options=detect_leaks=1:verify_asan_link_order=0:quarantine_size_mb=1:thread_local_quarantine_size_kb=64
LD_PRELOAD="$(${CC:-cc} -print-file-name=libasan.so)" PYTHONMALLOC=malloc LSAN_OPTIONS=exitcode=0 \
    ASAN_OPTIONS="${ASAN_OPTIONS:-}:$options:stack_trace_format=#%n;%m;%f;%S:log_path=$work/report" "$@"
status=$?
# The first frame beyond the allocator tells whose memory it is.
cat "$work"/report* 2>/dev/null >"$work/all"
awk '
    / leak of / { block = $0; open = 1; next }
    open && /^ *#[0-9]/ {
        block = block "\n" $0
        if ($0 !~ /;[^;]*\/lib(asan|c)\.so/ && !judged) {
            judged = 1
            ours = $0 ~ /;[^;]*\/(libglm52|_glm52)/
        }
        next
    }
    open { if (ours) { print block; found = 1 } open = ours = judged = 0 }
    /ERROR: AddressSanitizer|runtime error/ { print; found = 1 }
    END { exit found }
' "$work/all" >"$work/ours" || {
    sed 's/^/# /' "$work/ours"
    echo "not ok - memory of the library or its binding: reports of the sanitizer above"
    status=1
}
exit $status
