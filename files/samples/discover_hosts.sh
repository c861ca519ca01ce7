#!/bin/sh
# For horovodrun --host-discovery-script: prints the nodes of the hostfile that accept ssh connections, one slot each.
hostfile=${HOSTFILE:-/etc/farandole/hostfile}
port='echo 22'
# Only in clusters that have other ports, because ssh takes 10 ms to tell, every second and for each node.
! grep -qs '^ *Port ' /etc/ssh/ssh_config.d/10-farandole.conf || port='ssh -G HOST | sed -n "s/^port //p"'
# In parallel, so that a node that is down does not hold up the others.
sed -n 's/^\([^# ][^ ]*\).*/\1/p' "$hostfile" | xargs -P 32 -I HOST \
  sh -c "timeout 2 bash -c \"</dev/tcp/HOST/\$($port)\" 2>/dev/null && echo HOST:1" | sort
