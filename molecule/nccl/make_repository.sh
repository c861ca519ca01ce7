#!/bin/sh
# make_repository.sh FOLDER VERSION DEB: make a signed repository of the debs in FOLDER, and DEB, which installs those of
# VERSION as a local repository, as NVIDIA's local-repo debs do. Prints the fingerprint of the repository's key.
set -eu
folder=$1 version=$2 deb=$3
name=nccl-local-repo-debian12-$version
local=$folder/../local
GNUPGHOME=$(mktemp -d)
export GNUPGHOME

key() { # ID
    gpg --batch --quiet --passphrase '' --quick-generate-key "$1" rsa3072 sign never
}

sign() { # FOLDER ID
    cd "$1"
    apt-ftparchive packages . >Packages
    apt-ftparchive release . >Release
    gpg --batch --yes --local-user "$2" --clear-sign --output InRelease Release
}

key network
sign "$folder" network
gpg --armor --export network >"$folder/key.pub"

key local
rm -rf "$local" && mkdir -p "$local/DEBIAN" "$local/var/$name" "$local/etc/apt/sources.list.d"
ln "$folder"/libnccl*_"$version"*.deb "$local/var/$name"
sign "$local/var/$name" local
gpg --export local >"$local/var/$name/nccl-local-TEST-keyring.gpg"
echo "deb [signed-by=/usr/share/keyrings/nccl-local-TEST-keyring.gpg] file:///var/$name /" \
    >"$local/etc/apt/sources.list.d/nccl-local-debian12-$version.list"
cat >"$local/DEBIAN/control" <<EOF
Package: $name
Version: 1.0-1
Architecture: amd64
Maintainer: Farandole <root@localhost>
Section: misc
Priority: optional
Description: local repository of NCCL $version
EOF
dpkg-deb --root-owner-group -Znone --build "$local" "$deb" >/dev/null
gpg --with-colons --list-keys network | awk -F: '$1 == "fpr" {print $10; exit}'
rm -rf "$local" "$GNUPGHOME"
