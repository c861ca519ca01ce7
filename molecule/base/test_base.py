"""What role base promises of every node."""

import pytest


@pytest.mark.parametrize("package", ["git", "curl", "vim", "wget", "ca-certificates"])
def test_packages_are_installed(host, package):
    assert host.package(package).is_installed


def test_job_user_is_the_same_everywhere_and_has_no_way_up(host):
    user = host.user("trainer")
    assert (user.uid, user.gid, user.shell) == (2000, 2000, "/bin/bash")
    assert user.groups == ["trainer"]
    assert user.password == "*"  # noqa: S105, the entry that no password matches


def test_every_name_leads_to_its_address_and_never_to_loopback(host, addresses):
    for name, address in addresses.items():
        assert host.check_output("getent ahostsv4 %s", name).split()[0] == address


def test_node_is_called_as_in_the_inventory(host):
    assert host.check_output("hostname") == host.ansible.get_variables()["inventory_hostname"]


def test_limits_reach_a_session_of_the_job_user(host):
    variables = host.ansible.get_variables()
    limits = host.check_output("su - trainer -c 'ulimit -n; ulimit -l'").split()
    assert limits == [variables.get("base_nofile", "1048576"), variables.get("base_memlock", "unlimited")]


def test_unattended_upgrades_leave_pinned_packages_alone(host):
    assert '"libnccl"' in host.check_output("apt-config dump Unattended-Upgrade::Package-Blacklist")


def test_something_keeps_the_time(host):
    assert host.check_output("systemctl is-enabled systemd-timesyncd") == "enabled"


def test_a_login_that_ends_takes_no_semaphores_of_jobs_along(host):
    manager = "org.freedesktop.login1 /org/freedesktop/login1 org.freedesktop.login1.Manager"
    assert host.check_output(f"busctl get-property {manager} RemoveIPC") == "b false"
