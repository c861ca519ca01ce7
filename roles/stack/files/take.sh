# Takes the wheel that the step before made, whose name begins with NAME; the package has written what is there.
made=/var/cache/private/farandole-build
rm -rf wheel
mkdir wheel
find "$made/wheel" -maxdepth 1 -type f -iname "$NAME-*.whl" -exec cp --no-dereference '{}' wheel ';'
rm -rf "$made" /var/cache/farandole-build
tar --create --zstd --file wheel.tar.zst.part --sort=name --owner=0 --group=0 --numeric-owner wheel
mv wheel.tar.zst.part wheel.tar.zst
sha256sum wheel.tar.zst >wheel.tar.zst.sha256
