"""Role base on every node."""

import pytest


@pytest.mark.parametrize("package", ["git", "curl", "vim", "wget", "ca-certificates"])
def test_packages_are_installed(host, package):
    assert host.package(package).is_installed


def test_the_job_user_is_the_same_on_all_nodes_and_unprivileged(host):
    user = host.user("trainer")
    assert (user.uid, user.gid, user.shell) == (2000, 2000, "/bin/bash")
    assert sorted(user.groups) == ["farandole-jobs", "trainer"]
    assert user.password == "*"  # noqa: S105, the entry that no password matches


def test_every_name_resolves_to_its_address_and_never_to_loopback(host, addresses):
    for name, address in addresses.items():
        assert host.check_output("getent ahostsv4 %s", name).split()[0] == address


def test_the_host_name_is_that_of_the_inventory(host):
    assert host.check_output("hostname") == host.ansible.get_variables()["inventory_hostname"]


def test_limits_apply_to_the_job_users_sessions(host):
    variables = host.ansible.get_variables()
    limits = host.check_output("su - trainer -c 'ulimit -n; ulimit -l'").split()
    assert limits == [variables.get("base_nofile", "1048576"), variables.get("base_memlock", "unlimited")]


def test_unattended_upgrades_leave_pinned_packages_alone(host):
    assert '"libnccl"' in host.check_output("apt-config dump Unattended-Upgrade::Package-Blacklist")


def test_ipc_objects_survive_the_last_logout(host):
    manager = "org.freedesktop.login1 /org/freedesktop/login1 org.freedesktop.login1.Manager"
    assert host.check_output(f"busctl get-property {manager} RemoveIPC") == "b false"
