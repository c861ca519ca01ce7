# Managed by Farandole, role modules. Read before Debian's modules.sh, which defines the command itself.
case ":${MODULEPATH-}:" in
*:/etc/farandole/modulefiles:*) ;;
*) export MODULEPATH="/etc/farandole/modulefiles${MODULEPATH:+:$MODULEPATH}" ;;
esac
# For scripts of bash, such as those of jobs.
export BASH_ENV="${BASH_ENV:-/etc/farandole/modules.sh}"
