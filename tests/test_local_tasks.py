import pytest

from workflow.lib.errors import UserError
from workflow.lib.local_tasks import environment, local_task_names, refuse_code


@pytest.fixture
def tasks_dir(tmp_path):
    (tmp_path / "one.yaml").write_text(
        "task: one\ntag: [both, few]\nprocess_docs: !function code.that_is_not_there\n"
    )
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "two.yaml").write_text("include: _shared.yaml\ntask: two\ntag: both\n")
    (tmp_path / "deep" / "_shared.yaml").write_text("output_type: multiple_choice\n")
    (tmp_path / "group.yaml").write_text("group: all_of_them\ntask: [one, elsewhere]\n")
    (tmp_path / "empty.yaml").write_text("")
    return str(tmp_path)


def test_names_are_those_of_tasks_tags_and_groups(tasks_dir):
    assert local_task_names(tasks_dir) == {"one", "two", "both", "few", "all_of_them"}


def test_no_folder_has_no_names():
    assert local_task_names(None) == set()


def test_local_tasks_are_run_offline(tasks_dir):
    variables = environment(("one", "both"), tasks_dir)
    assert variables["HF_HUB_OFFLINE"] == variables["HF_DATASETS_OFFLINE"] == "1"


def test_a_task_of_the_harness_may_use_the_network(tasks_dir):
    assert "HF_HUB_OFFLINE" not in environment(("one", "arc_easy"), tasks_dir)


def test_folder_that_is_not_there_is_refused(tmp_path):
    missing = str(tmp_path / "tasks")
    with pytest.raises(UserError, match=r"evaluate\.tasks_dir = .*there is no such folder"):
        local_task_names(missing)


def test_file_that_is_not_yaml_is_named(tmp_path):
    (tmp_path / "broken.yaml").write_text("task: [one\n")
    with pytest.raises(UserError, match=r"broken\.yaml: is no YAML that can be read"):
        local_task_names(str(tmp_path))


CODE = {
    "function": "process_docs: !function utils.run",
    "function below a list": "metric_list: [{metric: !function utils.run}]",
    "function in an inline task": "task: [{task: x, doc_to_text: !function utils.run}]",
    "class": "class: !function utils.Task",
    "python object": "description: !!python/object/apply:os.system [true]",
    "trusted data set": "dataset_kwargs: {trust_remote_code: true}",
}


@pytest.mark.parametrize("line", CODE.values(), ids=CODE)
def test_task_file_that_would_run_code_is_refused(tmp_path, line):
    (tmp_path / "one.yaml").write_text(f"output_type: multiple_choice\n{line}\n")
    with pytest.raises(
        UserError, match=r"one\.yaml would run code \(.*evaluate\.task_code = False"
    ):
        refuse_code(str(tmp_path))


def test_code_behind_an_included_file_of_any_name_is_found(tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "one.yaml").write_text("task: one\ninclude: [../shared]\n")
    (tmp_path / "shared").write_text("include: tasks/one.yaml\nprocess_docs: !function utils.run\n")
    with pytest.raises(UserError, match=r"shared would run code \(!function utils\.run\)"):
        refuse_code(str(tmp_path / "tasks"))


def test_task_files_without_code_are_fine(tmp_path):
    (tmp_path / "one.yaml").write_text(
        "task: one\ndoc_to_text: '{{question}}'\nmore: &a [1, 2.5]\n"
    )
    (tmp_path / "loop.yaml").write_text("task: &a [*a]\n")
    refuse_code(str(tmp_path))
    refuse_code("workflow/resources/tasks")
