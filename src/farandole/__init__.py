"""Farandole: bare Linux machines in, a cluster that trains with Horovod out."""
