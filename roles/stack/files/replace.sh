# Removes $1 and, if given, moves $2 into its place; both are on the same file system as REMOVING. It is renamed before it
# is removed, so that nothing incomplete ever has its name.
mkdir -p "${1%/*}" "$REMOVING"
[ ! -e "$1" ] || mv "$1" "$REMOVING/${1##*/}.$$"
[ $# -eq 1 ] || mv "$2" "$1"
rm -rf "$REMOVING"
