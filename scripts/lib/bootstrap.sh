# Functions for the other scripts, which source this file. They create .venv in the
# checkout, once, and install the package into it with the requested extras. They need
# only a POSIX shell and Python.
#
#   set_up NAME EXTRAS    create $venv, whose Python has the package
#   set_up_peer           create $peer, whose Python has a real Synapse, and the
#                         requirements of the package's drop-in replication
#   get_java              print the extra that provides Java, if it is needed
#
# The package is installed in place: changed code needs no new installation, but a
# changed setup.cfg, a moved checkout or another Python does. Files in .venv record its
# origin and whether the installation was completed, so that an interrupted installation
# is repeated.

set -eu

# Let Python keep compiled modules, as in an installed package. Otherwise, each process
# compiles all modules when it starts. That takes a fifth of its time to start and up to
# 2 MiB of memory, and would be measured as well.
unset PYTHONDONTWRITEBYTECODE

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
venv=$root/.venv

say() { printf '%s\n' "$*" >&2; }

die() {
    say "$(basename -- "$0"): $*"
    exit 1
}

# Print the path of the first Python that is new enough and has the module venv. Query
# Python for its own path, because python3 may be the shim of a version manager.
find_python() {
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 \
        python3.10 /usr/bin/python3; do
        "$candidate" -c '
import os, sys
sys.version_info >= (3, 10) or sys.exit(1)
import ensurepip, venv
ensurepip.version()
print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
' 2>/dev/null && return 0
    done
    return 1
}

# Install Python with Debian's package manager, or print how to install it.
get_python() {
    package="python3 python3-venv"
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || die \
        "needs Python 3.10 or newer with its venv module;" \
        "have an administrator run: apt-get install $package"
    say "Installing $package with apt-get ..."
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086 # two packages
    { apt-get update -qq && apt-get install -qq -y --no-install-recommends $package; } \
        >&2 || die "apt-get could not install $package"
    find_python || die "found no Python 3.10 or newer with a venv module after the" \
        "installation; set PYTHON to the path of such a Python"
}

has_java() {
    java=java
    [ -z "${JAVA_HOME:-}" ] || java=$JAVA_HOME/bin/java
    # Version 17, the oldest that Spark supports, or newer.
    "$java" -version 2>&1 | grep -Eq 'version "(1[7-9]|[2-9][0-9])'
}

# Print the extra that contains Java, if the machine has no Java and apt-get cannot
# install it.
get_java() {
    has_java && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        package=openjdk-17-jre-headless
        say "Installing $package, for Spark, with apt-get ..."
        export DEBIAN_FRONTEND=noninteractive
        apt-get install -qq -y --no-install-recommends $package >&2 ||
            { apt-get update -qq &&
                apt-get install -qq -y --no-install-recommends $package; } >&2 ||
            say "apt-get could not install $package"
        has_java && return
    fi
    [ -z "${JAVA_HOME:-}" ] || die "JAVA_HOME is $JAVA_HOME, which contains no Java 17" \
        "or newer, which Spark needs; unset JAVA_HOME, or set it to the folder of a" \
        "newer Java"
    echo java
}

set_up() {
    python=$(find_python) || python=$(get_python)
    mark=$venv/installed-$1
    made_from="$python $root $2 $(cat "$root/setup.cfg" "$root/pyproject.toml" | cksum)"
    is_made_from && return
    # Lock, because the demo and the tests may be started at the same time.
    if command -v flock >/dev/null; then
        exec 9>"$root/.venv.lock"
        flock 9
    fi
    is_made_from || install_package "$2"
    exec 9>&-
}

set_up_peer() {
    peer=$root/.venv-peer
    "$peer/bin/python" -c 'import synapse, psycopg2, msgspec' 2>/dev/null && return
    say "Installing a real Synapse into $peer, once ..."
    rm -rf -- "$peer"
    "$python" -m venv -- "$peer" >&2
    # This copy of the package may become outdated: a Python that runs in the checkout
    # imports the package from there instead.
    "$peer/bin/python" -m pip install --quiet --disable-pip-version-check \
        matrix-synapse "$root[postgres-binary]" >&2 ||
        die "pip could not install matrix-synapse; its messages are above"
}

is_made_from() {
    [ -x "$venv/bin/python" ] && [ ! -e "$venv/unfinished" ] &&
        [ "$(cat "$mark" 2>/dev/null)" = "$made_from" ]
}

install_package() {
    origin="$python $root"
    if [ ! -x "$venv/bin/python" ] ||
        [ "$(cat "$venv/origin" 2>/dev/null)" != "$origin" ]; then
        say "Creating $venv ..."
        rm -rf -- "$venv"
        "$python" -m venv -- "$venv" >&2 || die "$python could not create $venv"
        printf '%s\n' "$origin" >"$venv/origin"
    fi
    : >"$venv/unfinished"
    say "Installing synapse_replication[$1] into $venv, once; this takes a minute ..."
    # Use a .pth file, which type checkers and the search for Twisted's plugins can
    # follow.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --config-settings editable_mode=compat --editable "$root[$1]" >&2 ||
        die "pip could not install the package; its messages are above"
    printf '%s\n' "$made_from" >"$mark"
    rm -f -- "$venv/unfinished"
}
