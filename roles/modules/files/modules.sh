# Managed by Farandole, role modules: defines the command module in scripts of bash and of sh; it costs nothing until it is used.
case ":${MODULEPATH-}:" in
*:/etc/farandole/modulefiles:*) ;;
*) export MODULEPATH="/etc/farandole/modulefiles${MODULEPATH:+:$MODULEPATH}" ;;
esac
if [ "${BASH_VERSION-}" ] && declare -F module > /dev/null; then
  :
else
  module() {
    unset -f module
    if [ "${BASH_VERSION-}" ]; then
      . /usr/share/modules/init/bash
    else
      . /usr/share/modules/init/sh
    fi
    module "$@"
  }
fi
