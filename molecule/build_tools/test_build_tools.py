"""Role build_tools: a builder can compile, a node without the role cannot."""

PROGRAM = "int main() { return __cplusplus >= 201703L ? 0 : 1; }"


def test_the_builder_compiles_and_runs_cplusplus_17(head):
    head.check_output("printf %s >/tmp/program.cc", PROGRAM)
    head.check_output("g++ -std=c++17 -o /tmp/program /tmp/program.cc && /tmp/program")


def test_the_chosen_compiler_is_installed_alongside(head):
    assert head.check_output("g++-11 -dumpversion") == "11"
    assert head.check_output("g++ -dumpversion") == "12"


def test_the_other_tools_run(head):
    for tool in ("cmake", "make", "git", "curl", "vim", "wget"):
        head.check_output("%s --version", tool)


def test_other_nodes_have_no_compiler(worker):
    assert not worker.exists("g++")
