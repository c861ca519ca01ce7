/* A stand-in for Intel Caffe: it trains nothing. It calls MPI as Caffe's MLSL does and prints the lines by which the
   launcher judges a training. `caffe train --solver FILE [--stand_in alone|hang|die|mute]`, each of which goes wrong:
   alone starts outside the job, as under a launcher of another MPI; hang never ends; die ends rank 1; mute ends without
   its last line. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

extern char **environ;
static char prefix[4096];
static long iterations;

static void say(const char *text) {
    char stamp[64];
    time_t now = time(NULL);
    strftime(stamp, sizeof stamp, "I%m%d %H:%M:%S.000000", localtime(&now));
    fprintf(stderr, "%s %5d stand_in_caffe.c:1] %s\n", stamp, (int)getpid(), text);
}

static void read_solver(const char *path) {
    char line[4096];
    FILE *file = fopen(path, "r");
    if (!file) {
        say("Check failed: fd != -1 (-1 vs. -1) File not found: the solver");
        exit(1);
    }
    while (fgets(line, sizeof line, file)) {
        sscanf(line, " max_iter: %ld", &iterations);
        sscanf(line, " snapshot_prefix: \"%4000[^\"]", prefix);
    }
    fclose(file);
}

/* Without the variables of its launcher, MPI takes a process for the only one. */
static void leave_job(const char *solver) {
    static const char *const ours[] = {"PMI", "OMPI_", "HYD"};
    char *kept[4096];
    int count = 0;
    for (char **one = environ; *one && count < 4095; one++) {
        int drop = 0;
        for (int place = 0; place < 3; place++)
            drop |= !strncmp(*one, ours[place], strlen(ours[place]));
        if (!drop)
            kept[count++] = *one;
    }
    kept[count] = NULL;
    execve("/proc/self/exe", (char *[]){"caffe", "train", "--solver", (char *)solver, NULL}, kept);
    exit(1);
}

int main(int argc, char **argv) {
    const char *solver = NULL, *mode = "";
    char text[8192], host[MPI_MAX_PROCESSOR_NAME];
    int rank, size, length;
    for (int place = 2; place + 1 < argc; place++) {
        if (!strcmp(argv[place], "--solver"))
            solver = argv[place + 1];
        if (!strcmp(argv[place], "--stand_in"))
            mode = argv[place + 1];
    }
    if (argc < 2 || strcmp(argv[1], "train") || !solver) {
        say("Check failed: this stand-in knows `train --solver FILE` only");
        return 1;
    }
    read_solver(solver);
    if (!strcmp(mode, "alone"))
        leave_job(solver);
    MPI_Init(NULL, NULL);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Get_processor_name(host, &length);
    snprintf(text, sizeof text, "stand-in for Intel Caffe, process group ID is %d on %s", rank, host);
    say(text);
    snprintf(text, sizeof text, "Number of groups: 1, group size: %d", size);
    say(text);
    say("Starting Multi-node Optimization in MLSL environment");
    if (!strcmp(mode, "die") && rank == 1) {
        /* Not before the lines of the other ranks are out. */
        sleep(2);
        abort();
    }
    for (long step = 1; step <= iterations; step++) {
        long mine = (rank + 1) * step, sum = 0;
        MPI_Allreduce(&mine, &sum, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
        if (sum != step * size * (size + 1) / 2) {
            say("Check failed: the sum of the ranks is wrong");
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
    if (rank == 0) {
        snprintf(text, sizeof text, "%s_iter_%ld.caffemodel", prefix, iterations);
        FILE *model = fopen(text, "w");
        if (!model) {
            say("Check failed: proto.SerializeToOstream(&output)");
            mode = "hang";
        } else {
            fprintf(model, "the model of a stand-in, from %d ranks\n", size);
            fclose(model);
        }
        say("    Test net output #0: accuracy = 1");
    }
    while (!strcmp(mode, "hang"))
        sleep(1);
    if (strcmp(mode, "mute"))
        say("Optimization Done.");
    MPI_Finalize();
    return 0;
}
