#!/bin/sh
# For horovodrun --host-discovery-script: prints the nodes of the hostfile that accept ssh connections, one slot each.
hostfile=${HOSTFILE:-/etc/farandole/hostfile}
# In parallel, so that a node that is down does not hold up the others.
sed -n 's/^\([^# ][^ ]*\).*/\1/p' "$hostfile" | xargs -P 32 -I HOST \
  sh -c 'timeout 2 bash -c "</dev/tcp/HOST/22" 2>/dev/null && echo HOST:1' | sort
