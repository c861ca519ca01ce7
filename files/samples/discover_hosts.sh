#!/bin/sh
# For horovodrun --host-discovery-script: the nodes of the hostfile that answer on the port of ssh, one slot each.
hostfile=${HOSTFILE:-/etc/farandole/hostfile}
# Side by side, so that one that is off does not hold up the others.
sed -n 's/^\([^# ][^ ]*\).*/\1/p' "$hostfile" | xargs -P 32 -I HOST \
  sh -c 'timeout 2 bash -c "</dev/tcp/HOST/22" 2>/dev/null && echo HOST:1' | sort
