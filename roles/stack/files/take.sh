# Takes the wheel that the step before made, whose name begins with NAME; the package has written what is there, and given it names, which
# become lines of a file that pip reads.
made=/var/cache/private/farandole-build
rm -rf wheel
mkdir wheel
find "$made/wheel" -maxdepth 1 -type f -iname "$NAME-*.whl" ! -name '*[!A-Za-z0-9._+!-]*' -exec cp --no-dereference '{}' wheel ';'
rm -rf "$made" /var/cache/farandole-build
tar --create --zstd --file wheel.tar.zst.part --sort=name --owner=0 --group=0 --numeric-owner wheel
mv wheel.tar.zst.part wheel.tar.zst
sha256sum wheel.tar.zst >wheel.tar.zst.sha256
