#!/usr/bin/env bash
# Makes an arm64 Debian root in DIR that runs here under emulation, with all that this package needs; does nothing where it is there already.
# usage: make_root.sh DIR PYTHON    (as root, on Debian; about seven minutes and 1.5 GB; packages come from this machine's own sources)
set -euo pipefail
root=${1:?usage: make_root.sh DIR PYTHON} python=${2:?usage: make_root.sh DIR PYTHON}
[ -e "$root/.ready" ] && exit 0
[ "$(id -u)" = 0 ] || { echo "an emulated root needs chroot: run this as root" >&2; exit 1; }
command -v apt-get >/dev/null || { echo "needs Debian or one of its descendants: debootstrap and qemu come from apt-get" >&2; exit 1; }
[ ! -e "$root" ] || { echo "$root is there, but incomplete: remove it" >&2; exit 1; }
mkdir -p "$root"
root=$(realpath "$root")

apt-get install -y -qq qemu-user-static debootstrap gcc-aarch64-linux-gnu unzip >/dev/null
mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -E '/debian/?$' | head -n 1)
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
# g++ links there what is sent as objects.
debootstrap --arch=arm64 --variant=minbase --foreign --include=python3,g++ "$suite" "$root" "$mirror" >/dev/null
cp /usr/bin/qemu-aarch64-static "$root/usr/bin/"
# Containers mount it read-only or not at all, and start no service that registers the interpreter.
mountpoint -q /proc/sys/fs/binfmt_misc || mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
[ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ] || grep -v '^#' /usr/lib/binfmt.d/qemu-aarch64.conf | grep . >/proc/sys/fs/binfmt_misc/register
chroot "$root" /debootstrap/debootstrap --second-stage >/dev/null

# What this machine's environment has, for the other architecture: both ends of a remote procedure call have to agree.
version=$(chroot "$root" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
requirements=$("$python" -c 'from importlib.metadata import version
print(*(f"{name}=={version(name)}" for name in ("apache-tvm", "apache-tvm-ffi", "onnx")), "cloudpickle", "filelock", "jinja2", "ml_dtypes",
  "numpy", "platformdirs", "psutil", "rich", "tornado", "typer", "typing_extensions")')
wheels=$(mktemp -d)
trap 'rm -r "$wheels"' EXIT
# shellcheck disable=SC2086
"$python" -m pip download -q -d "$wheels" --only-binary=:all: --python-version "$version" --implementation cp \
  --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_24_aarch64 \
  --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 $requirements
mkdir -p "$root/opt/site"
for wheel in "$wheels"/*.whl; do unzip -q -o "$wheel" -d "$root/opt/site"; done
chroot "$root" env PYTHONPATH=/opt/site python3 -c 'import tvm, platform; assert platform.machine() == "aarch64"'
touch "$root/.ready"
