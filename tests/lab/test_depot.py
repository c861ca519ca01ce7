"""The depot on a head that loses power."""

from pathlib import Path

from clusters import Cluster, web

NODES = 1

DEPOT = """
- hosts: head
  gather_facts: false
  become: true
  roles: [farandole.cluster.depot]
"""


def test_a_head_killed_while_nginx_is_installed_serves_only_the_depot(bare: Cluster, tmp_path: Path) -> None:
    playbook = tmp_path / "depot.yml"
    playbook.write_text(DEPOT)
    bare.play_while("node-1", "test -e /usr/sbin/nginx", playbook=str(playbook))
    bare.lab("fault", "kill", "node-1")
    bare.lab("fault", "start", "node-1")
    # Finishing the installation by hand and rebooting does not start Debian's default site.
    assert bare.ssh("node-1", "dpkg", "--configure", "--pending").returncode == 0
    assert web(bare) == ["masked"]
    bare.lab("fault", "reboot", "node-1")
    assert web(bare) == ["masked"]
    bare.play_ok(playbook=str(playbook))
    assert web(bare) == ["8480", "masked"]
    assert bare.play_ok(playbook=str(playbook)).changed_hosts == set()
