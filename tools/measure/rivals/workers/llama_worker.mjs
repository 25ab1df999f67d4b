// Decodes with llama.cpp through node-llama-cpp: plainly, or with prompt lookup; for many clients,
// in as many sequences of one context, which share its passes. Speaks the protocol of protocol.py.
import {createRequire} from "node:module";
import path from "node:path";
import {pathToFileURL} from "node:url";
import readline from "node:readline";

const settings = JSON.parse(process.argv[2]);

function reply(content) {
    process.stdout.write(JSON.stringify(content) + "\n");
}

async function openEngine() {
    // The package lies in the folder of the environment, not beside this file.
    const {resolve} = createRequire(path.join(settings.packages, "package.json"));
    const entry = resolve("node-llama-cpp");
    const llamaCpp = await import(pathToFileURL(entry));
    const llama = await llamaCpp.getLlama({
        gpu: false, build: "never", logLevel: "error", maxThreads: settings.threads
    });
    const model = await llama.loadModel({modelPath: settings.model, gpuLayers: 0});
    // At fp32 the cache is as exact as the weights; below, llama.cpp's default holds.
    const exact = settings.precision === "fp32"
        ? {experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32"}
        : {};
    const options = {};
    if (settings.mode === "lookup")
        options.tokenPredictor = new llamaCpp.InputLookupTokenPredictor({
            patternLength: {min: 1, max: settings.lookup_ngram},
            predictionLength: {max: settings.lookup_tokens}
        });
    let context, sequences = [];

    async function reserve(count) {
        if (sequences.length === count)
            return;
        await context?.dispose();
        context = await model.createContext({
            sequences: count,
            contextSize: settings.max_length, // of each sequence
            threads: {ideal: settings.threads, min: settings.threads},
            ...exact
        });
        sequences = Array.from({length: count}, () => context.getSequence(options));
    }

    async function answerAll({prompts, clients, max_new_tokens: maxNewTokens}) {
        await reserve(clients);
        const begin = performance.now();
        const now = () => (performance.now() - begin) / 1000;
        const answers = [];

        async function client(sequence) {
            while (answers.length < prompts.length) {
                const ids = prompts[answers.length];
                const answer = {sent: now(), parts: [], tokens: []};
                answers.push(answer);
                await sequence.clearHistory();
                sequence.tokenPredictor?.updateInputTokens?.(ids);
                const asked = {temperature: 0, yieldEogToken: true};
                for await (const token of sequence.evaluate(ids, asked)) {
                    answer.parts.push([now(), 1]);
                    const isEnd = settings.may_end && settings.end_ids.includes(token);
                    if (answer.tokens.push(token) >= maxNewTokens || isEnd)
                        break;
                }
            }
        }

        await Promise.all(sequences.map(client));
        return {seconds: now(), answers};
    }

    await reserve(1);
    const {release} = llama.llamaCppRelease;
    return {
        version: `node-llama-cpp ${settings.version}, llama.cpp ${release}`,
        answer: answerAll
    };
}

try {
    const {version, answer} = await openEngine();
    reply({version});
    for await (const line of readline.createInterface({input: process.stdin}))
        reply(await answer(JSON.parse(line)));
} catch (error) {
    console.error(error);
    reply({error: String(error)});
}
process.exit(0);
